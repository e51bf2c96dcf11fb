"""What does each verb do with its options? A verb a module, or verbs that are alike."""
