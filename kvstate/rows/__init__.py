"""What an owner holds, as bytes: in the state file, and from one router or process to another."""
