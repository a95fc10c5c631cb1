"""What two processes of a run must agree on. Never imports torch; imports in well under 200 ms."""
