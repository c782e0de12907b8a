"""The fast CPU implementation of the ops in functional/."""
