/* The types Pace and LoadNumbers: what a decision reads of a worker's record. */
#ifndef KVSTEER_NUMBERS_H
#define KVSTEER_NUMBERS_H

#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdbool.h>

#include "survey.h"

extern PyType_Spec pace_spec, numbers_spec;

/* Keeps both types, by which records are recognized. */
void numbers_prepare(PyObject *pace_type, PyObject *numbers_type);

/* Reads a worker's numbers; false if the object is something else. */
bool numbers_read(PyObject *numbers, WorkerRecord *record);

#endif
