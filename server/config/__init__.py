"""From presets, environment and flags to one frozen configuration, and from that to the engine's arguments."""
