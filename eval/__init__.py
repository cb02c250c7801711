"""Quality and speed reports."""
