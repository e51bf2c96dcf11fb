"""What is wrong with a quantized checkpoint of another program? Reads headers and samples."""
