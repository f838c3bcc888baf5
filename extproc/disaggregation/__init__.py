"""Disaggregation, the step after the pick: one worker computes the prompt, another answers."""
