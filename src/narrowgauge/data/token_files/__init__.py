"""How do tokens lie in files: ours, and those of other programs?"""
