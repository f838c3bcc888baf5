/* Token ids as JSON. */
#ifndef KVSTEER_ID_LIST_H
#define KVSTEER_ID_LIST_H

#define Py_LIMITED_API 0x030B0000
#include <Python.h>

PyObject *module_id_list(PyObject *module, PyObject *tokens);

#endif
