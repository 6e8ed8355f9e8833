"""What the ImageNet examples share: options, data, schedule, checkpoints, table and picture."""
