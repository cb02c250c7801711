"""The work of `wedlm push`: a folder is checked, then uploaded to the Hub."""
