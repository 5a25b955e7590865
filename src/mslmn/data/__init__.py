"""Data: files -> sequences. The package carries what its experiments need, and reads the user's own."""
