"""The documents: links, snippets, pasted outputs, the site, the versions that they name."""
