"""A record of requests without their prompts: `recorder`."""
