"""Pages that need nothing beside them, and plots in their colours."""
