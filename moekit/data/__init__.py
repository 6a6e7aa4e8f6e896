"""From chats to rows: reading, rendering, masking, packing and streaming training examples."""
