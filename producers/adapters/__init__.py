"""What editors send or log today, as `Event`s. Pure functions, one module an editor; each has a page in
docs/editors/ that maps field to field.

None of them takes over a path, a prompt or a name; code only when it is asked for (`with_text`). Ids that an
editor does not give are made from the content, so that a log replayed twice has the same ids.
"""
