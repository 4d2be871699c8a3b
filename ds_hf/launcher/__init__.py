"""Starting training on one machine or many: which slots, which environment, and how the processes get there.

Resource selection and remote start are here; the processes of a machine run under torch's elastic agent.
How it works is in docs/design/names.md.
"""
