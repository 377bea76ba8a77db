"""Conversations: from files of prompts and chats to token ids with a loss mask."""
