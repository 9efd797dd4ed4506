"""A model behind HTTP: the server, and the form of requests and answers.

It stands on jaxkv's public names, as servers of users do. What knows HTTP or OpenAI's fields goes here.
"""
