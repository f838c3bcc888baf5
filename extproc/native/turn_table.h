/* What the module gets of turn_table.c. */
#ifndef KVSTEER_TURN_TABLE_H
#define KVSTEER_TURN_TABLE_H

#include <Python.h>

extern PyType_Spec turn_table_spec;
PyObject *module_plain_chat(PyObject *module, PyObject *given);
PyObject *module_turn_texts(PyObject *module, PyObject *given);

#endif
