"""What Ray adds to workers that it keeps."""
