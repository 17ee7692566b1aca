"""What the command line trains: images, small models, checkpoints and the demo, on the front doors any user has."""
