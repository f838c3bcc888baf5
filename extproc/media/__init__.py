"""Images, audio and video: what each of them is to the engines, learned from their events."""
