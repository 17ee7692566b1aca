"""What the command line trains: images, small models, checkpoints and the demo, built on the public front doors."""
