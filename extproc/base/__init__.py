"""What everything else stands on: addresses, errors, header names, logs."""
