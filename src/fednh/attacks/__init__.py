"""What a curious server learns from a client's upload, measured: `fednh attack`.

target.py      a client's upload of a round, computed again; what the server knows of it; the public samples
simulate.py    uploads that the server computes for itself, of clients that it makes up
labels.py      which classes a client has, and how many samples of each
membership.py  whether a sample was among the client's
images.py      the images themselves; layers.py has the algebra of a linear layer's update
audit.py       a lower bound of epsilon from one run; canaries.py runs it on this implementation
suite.py       all of them on some clients; sheet.py shows what came out

The server is honest but curious: it follows the protocol and looks at what it receives. It knows the config (and so the
method, the optimiser and the seed), its own state, the number of a client's samples, and public samples of the same
kind, of which the client's are not a part.
"""
