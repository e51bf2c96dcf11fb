"""How is one optimizer step taken, and judged?"""
