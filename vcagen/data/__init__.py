"""From image files to the moments a step reads, and from latents to pixels."""
