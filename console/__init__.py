"""What every command shares: files of prompts, and the line that shows progress."""
