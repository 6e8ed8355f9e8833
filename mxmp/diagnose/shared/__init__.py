"""What reports share: pictures, and files that are whole or not there."""
