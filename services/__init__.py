"""The roles and commands of draftmill. Importing this package imports nothing else."""
