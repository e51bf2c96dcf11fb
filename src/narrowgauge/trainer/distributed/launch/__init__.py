"""The rank of this process, from its launcher's environment."""
