"""Every family of networks in three dtypes."""
