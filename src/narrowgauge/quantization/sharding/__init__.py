"""Where does a local tensor lie in the global one, and how do its ranks agree on scales?"""
