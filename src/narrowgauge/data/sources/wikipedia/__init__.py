"""How does a MediaWiki dump become prose?"""
