/* The types CompiledPace and CompiledNumbers: what a decision reads of a worker's record. */
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

/* How what other routers tell is counted: the time, the configured tokens per second, the seconds in
 * which what was sent fades, and the most tokens that count as sent lately. */
typedef struct {
    double now, rate, window, most;
} SharingRules;

/* Adds what another router told: extproc.routing.load_numbers.PlainNumbers.share describes it. False
 * after an error. */
bool numbers_share_told(PyObject *numbers, long long requests, long long booked, double queued,
                        double sent, const SharingRules *rules);

#endif
