"""What trains, over the low dtype's range."""
