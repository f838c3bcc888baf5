/* The keys of marks, and what overlaps are worth: extproc/routing/marks.py and claims.py describe it
 * and have the same in Python. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdbool.h>

#include "claims.h"
#include "mark_table.h"
#include "objects.h"

static PyObject *saved_word;

/* chained(key, view, parts, root): the key of each part, in which the one before it is mixed. */
PyObject *module_chained(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t were) {
    if (!are_given(given, were, "ooto")) return NULL;
    PyObject *key = given[0], *view = given[1], *parts = given[2], *root = constant(given[3]);
    Py_ssize_t count = PyTuple_Size(parts);
    PyObject *keys = PyBytes_FromStringAndSize(NULL, count * MARK_KEY_BYTES);
    for (Py_ssize_t n = 0; keys && n < count; n++) {
        PyObject *part = PyObject_GetItem(view, PyTuple_GetItem(parts, n));
        PyObject *next = part ? PyObject_CallFunctionObjArgs(key, part, root, NULL) : NULL;
        Py_XDECREF(part);
        Py_DECREF(root);
        root = next;
        uint64_t number = next ? PyLong_AsUnsignedLongLong(next) : 0;
        if (PyErr_Occurred())
            Py_CLEAR(keys);
        else
            mark_key_write(PyBytes_AsString(keys) + n * MARK_KEY_BYTES, number);
    }
    Py_XDECREF(root);
    return keys;
}

/* --- what overlaps are worth --- */

/* An overlap of kvstate.overlap: sizes in blocks. */
typedef struct {
    long long block_size, device, certain, uncertain;
    bool is_plain; /* all on the device, and certain */
} HeldBlocks;

static bool read_overlap(PyObject *overlap, HeldBlocks *held) {
    if (!PyTuple_Check(overlap) || PyTuple_Size(overlap) != 5) {
        PyErr_SetString(PyExc_TypeError, "no overlap");
        return false;
    }
    PyObject *tiers = PyTuple_GetItem(overlap, 1);
    if (!PyTuple_Check(tiers) || PyTuple_Size(tiers) != 4) {
        PyErr_SetString(PyExc_TypeError, "no overlap");
        return false;
    }
    held->device = PyLong_AsLongLong(PyTuple_GetItem(tiers, 0));
    long long host = PyLong_AsLongLong(PyTuple_GetItem(tiers, 1));
    long long disk = PyLong_AsLongLong(PyTuple_GetItem(tiers, 2));
    long long remote = PyLong_AsLongLong(PyTuple_GetItem(tiers, 3));
    held->block_size = PyLong_AsLongLong(PyTuple_GetItem(overlap, 0));
    held->uncertain = PyLong_AsLongLong(PyTuple_GetItem(overlap, 2));
    held->certain = held->device + host + disk + remote;
    held->is_plain = !(host || disk || remote || held->uncertain);
    return !PyErr_Occurred();
}

typedef struct {
    PyObject *found, *unsure, *worth, *claims_class;
} Weighing;

/* Returns the claims of a worker with one more overlap; NULL after an error. */
static PyObject *claims_with(const Weighing *weighing, PyObject *before, PyObject *overlap) {
    HeldBlocks held;
    if (!read_overlap(overlap, &held)) return NULL;
    PyObject *worth = held.is_plain
                          ? PyLong_FromLongLong(held.block_size * held.device)
                          : PyObject_CallFunctionObjArgs(weighing->worth, overlap,
                                                         weighing->unsure, NULL);
    if (worth && before) {
        PyObject *own = worth, *saved = PyObject_GetAttr(before, saved_word);
        worth = saved ? PyNumber_Add(own, saved) : NULL;
        Py_XDECREF(saved);
        Py_DECREF(own);
    }
    PyObject *made =
        worth ? PyObject_CallFunctionObjArgs(weighing->claims_class, worth, NULL) : NULL;
    Py_XDECREF(worth);
    return made;
}

/* Adds what workers hold of one prompt; false after an error. */
static bool weigh_overlaps(const Weighing *weighing, PyObject *overlaps) {
    PyObject *name, *overlap;
    Py_ssize_t at = 0;
    while (PyDict_Next(overlaps, &at, &name, &overlap)) {
        PyObject *before = PyDict_GetItemWithError(weighing->found, name);
        if (!before && PyErr_Occurred()) return false;
        PyObject *after = claims_with(weighing, before, overlap);
        bool is_set = after && !PyDict_SetItem(weighing->found, name, after);
        Py_XDECREF(after);
        if (!is_set) return false;
    }
    return true;
}

/* Appends the expected lengths of one prompt that go beyond what is certain; false after an error. */
static bool append_beyond(PyObject *beyond, Py_ssize_t number, PyObject *overlaps,
                          PyObject *expected) {
    PyObject *name, *lengths;
    Py_ssize_t at = 0;
    while (PyDict_Next(expected, &at, &name, &lengths)) {
        long long speculative, approximate;
        HeldBlocks held = {0};
        if (!PyArg_ParseTuple(lengths, "LL", &speculative, &approximate)) return false;
        PyObject *overlap = overlaps ? PyDict_GetItemWithError(overlaps, name) : NULL;
        if (overlap && !read_overlap(overlap, &held)) return false;
        if (PyErr_Occurred()) return false;
        long long most = speculative > approximate ? speculative : approximate;
        if (most <= held.certain * held.block_size) continue;
        PyObject *row = Py_BuildValue("(nOO)", number, name, lengths);
        bool is_added = row && !PyList_Append(beyond, row);
        Py_XDECREF(row);
        if (!is_added) return false;
    }
    return true;
}

/* Returns one of a sequence of dictionaries, borrowed from a list or a tuple. */
static PyObject *dictionary_at(PyObject *list, Py_ssize_t at) {
    PyObject *one = PyList_Check(list) ? PyList_GetItem(list, at) : PyTuple_GetItem(list, at);
    if (!one || PyDict_Check(one)) return one;
    PyErr_SetString(PyExc_TypeError, "no dictionary");
    return NULL;
}

/* weighed(held, expected, unsure, worth, claims) */
PyObject *module_weighed(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t were) {
    if (!are_given(given, were, "ooooo")) return NULL;
    PyObject *held = given[0], *expected = given[1];
    Weighing weighing = {.unsure = given[2], .worth = given[3], .claims_class = given[4]};
    Py_ssize_t prompts = PySequence_Size(held), known = PySequence_Size(expected);
    if (prompts < 0 || known < 0) return NULL;
    PyObject *beyond = PyList_New(0);
    weighing.found = PyDict_New();
    bool is_sound = beyond && weighing.found;
    for (Py_ssize_t n = 0; is_sound && n < prompts; n++) {
        PyObject *overlaps = dictionary_at(held, n);
        is_sound = overlaps && weigh_overlaps(&weighing, overlaps);
    }
    for (Py_ssize_t n = 0; is_sound && n < known; n++) {
        PyObject *each = dictionary_at(expected, n);
        PyObject *overlaps = prompts ? dictionary_at(held, n) : NULL;
        is_sound = each && (overlaps || !prompts) && append_beyond(beyond, n, overlaps, each);
    }
    PyObject *made = is_sound ? PyTuple_Pack(2, weighing.found, beyond) : NULL;
    Py_XDECREF(weighing.found);
    Py_XDECREF(beyond);
    return made;
}

/* held_tokens(name, overlaps): how many tokens a worker certainly holds of prompts, and how many perhaps. */
PyObject *module_held(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t were) {
    if (!are_given(given, were, "oo")) return NULL;
    PyObject *name = given[0], *prompts = given[1];
    long long certain = 0, uncertain = 0;
    Py_ssize_t count = PySequence_Size(prompts);
    for (Py_ssize_t n = 0; n < count; n++) {
        HeldBlocks held;
        PyObject *overlaps = dictionary_at(prompts, n);
        PyObject *overlap = overlaps ? PyDict_GetItemWithError(overlaps, name) : NULL;
        if (PyErr_Occurred() || (overlap && !read_overlap(overlap, &held))) return NULL;
        if (!overlap) continue;
        certain += held.block_size * held.certain;
        uncertain += held.block_size * held.uncertain;
    }
    return count < 0 ? NULL : Py_BuildValue("(LL)", certain, uncertain);
}

bool claims_prepare(void) {
    saved_word = PyUnicode_InternFromString("saved");
    return saved_word != NULL;
}
