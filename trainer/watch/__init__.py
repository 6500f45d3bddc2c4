"""What is looked at beside the training: dumps of odd steps, profiles, speed."""
