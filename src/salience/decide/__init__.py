"""Decide: which lever next, did it help, keep or undo?

    window measured -> best predicted lever goes on -> windows with and without it -> kept, or undone

One settings value per window, one question at each window's edge; the run applies the answer.
"""
