"""What scripts share: the peers' ideas, and candidate rules for a plan's tolerance. Nothing here runs alone."""
