"""What was sent to which worker: marks of prompts, claims on them, homes of conversations."""
