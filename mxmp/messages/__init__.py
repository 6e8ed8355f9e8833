"""What is said of what a user wrote."""
