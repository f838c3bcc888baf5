/* The decoder of a proxy's messages; extproc/_core.pyi describes it. */
#ifndef KVSTEER_DECODER_H
#define KVSTEER_DECODER_H

#include "hpack.h"

/* Adds the type to the module; false after an error. */
bool decoder_add(PyObject *module);

bool is_decoder(PyObject *object);

/* Returns what a message says; NULL, without an error, if it leaves the message to protobuf. */
PyObject *decoder_read(PyObject *decoder, Text message);

#endif
