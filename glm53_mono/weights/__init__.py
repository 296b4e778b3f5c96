"""Weight matrices as the launch reads them: where they are, in which format and layout."""
