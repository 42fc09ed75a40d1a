"""What a person starts: `python -m scripts.NAME`. The logic is in the packages."""
