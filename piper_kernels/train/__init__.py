"""The training loop behind piper train."""
