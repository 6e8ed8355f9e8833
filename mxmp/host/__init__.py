"""What mxmp runs on: MXNet's version, the CPU, files and processes."""
