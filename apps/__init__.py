"""What people use without writing code: `wedlm demo`, a page in the browser."""
