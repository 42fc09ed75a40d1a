"""Steps recorded once and replayed, with neighbouring operations fused, and checked before they are served."""
