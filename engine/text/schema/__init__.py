"""JSON schemas on their way to the grammar library: checked, with exact numbers."""
