"""Other verifiers, written here from their papers to be compared with: multi-norm zonotopes (`zonotope`)."""
