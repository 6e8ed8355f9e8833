"""What is measured of every model and every operator."""
