/* The loads of the workers that a decision compares, in columns, and the draws: extproc/_core.pyi
 * describes them. */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include "columns.h"
#include "numbers.h"
#include "objects.h"

typedef struct {
    WorkerLoad load;
    PyObject *report; /* NULL if it does not count */
    PyObject *whole;  /* the load, if it was given as one; else NULL */
    bool is_known;    /* whether the worker has a record */
} Row;

typedef struct {
    PyObject_HEAD
    PyObject *load_class;
    Row *rows;
    Py_ssize_t count;
} CoreColumns;

enum {
    ENDPOINT,
    NAME,
    NUMBERS,
    REPORT,
    IN_FLIGHT,
    BACKLOG_TOKENS,
    OTHERS,
    UTILIZATION,
    SLOWNESS,
    AFFINITY_PERCENT,
    BUSY_AFFINITY_PERCENT,
    PREFILL_TOKENS_PER_SECOND,
    WORDS
};

static const char *const SPELLED[WORDS] = {"endpoint",
                                           "name",
                                           "numbers",
                                           "report",
                                           "in_flight",
                                           "backlog_tokens",
                                           "others",
                                           "utilization",
                                           "slowness",
                                           "affinity_percent",
                                           "busy_affinity_percent",
                                           "prefill_tokens_per_second"};

static PyObject *words[WORDS];

/* Reads a number; false if the object has none. */
static bool get_number(PyObject *object, int word, double *number) {
    PyObject *value = PyObject_GetAttr(object, words[word]);
    if (!value) return false;
    *number = PyFloat_AsDouble(value);
    Py_DECREF(value);
    return *number != -1.0 || !PyErr_Occurred();
}

/* Computes the load of an endpoint from its record; false after an error. */
static bool read_row(PyObject *endpoints, PyObject *endpoint, const SurveyRules *rules, Row *row) {
    *row = (Row){.load = {.slowness = 1.0}};
    PyObject *state = PyDict_GetItemWithError(endpoints, endpoint);
    if (!state) return !PyErr_Occurred();
    WorkerRecord record;
    PyObject *numbers = PyObject_GetAttr(state, words[NUMBERS]);
    bool is_read = numbers && numbers_read(numbers, &record);
    Py_XDECREF(numbers);
    if (!is_read) return false;
    row->is_known = true;
    row->load = survey_load(&record, rules);
    if (row->load.counts) row->report = PyObject_GetAttr(state, words[REPORT]);
    return row->report || !row->load.counts;
}

/* Copies the numbers of a load; false after an error. */
static bool read_whole(PyObject *whole, Row *row) {
    *row = (Row){.whole = constant(whole)};
    return get_number(whole, IN_FLIGHT, &row->load.in_flight) &&
           get_number(whole, BACKLOG_TOKENS, &row->load.backlog_tokens) &&
           get_number(whole, OTHERS, &row->load.others) &&
           get_number(whole, UTILIZATION, &row->load.utilization) &&
           get_number(whole, SLOWNESS, &row->load.slowness);
}

/* Returns a row as a load. */
static PyObject *load_of_row(const Row *row, PyObject *load_class) {
    const WorkerLoad *load = &row->load;
    if (row->whole) return constant(row->whole);
    if (!row->is_known) return PyObject_CallNoArgs(load_class);
    PyObject *others = row->report ? PyFloat_FromDouble(load->others)
                                   : PyLong_FromDouble(load->others); /* they are counted */
    PyObject *report = row->report ? row->report : Py_None;
    PyObject *values = Py_BuildValue("(ndNdOdd)", (Py_ssize_t)load->in_flight, load->backlog_tokens,
                                     others, load->utilization, report, load->age_seconds,
                                     load->slowness);
    PyObject *made = values ? PyObject_CallObject(load_class, values) : NULL;
    Py_XDECREF(values);
    return made;
}

static void columns_dealloc(CoreColumns *self) {
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    for (Py_ssize_t n = 0; n < self->count; n++) {
        Py_XDECREF(self->rows[n].report);
        Py_XDECREF(self->rows[n].whole);
    }
    PyMem_Free(self->rows);
    Py_XDECREF(self->load_class);
    PyObject_Free(self);
    Py_DECREF(type);
}

/* Reads a row for each worker: from its endpoint's record, or without rules from the load itself. */
static bool read_rows(CoreColumns *self, PyObject *endpoints, PyObject *workers,
                      const SurveyRules *rules) {
    Py_ssize_t count = PySequence_Size(workers);
    if (count < 0) return false;
    self->rows = PyMem_Malloc(sizeof(Row) * (size_t)(count + 1));
    if (!self->rows) return PyErr_NoMemory() != NULL;
    while (self->count < count) {
        PyObject *worker = PySequence_GetItem(workers, self->count);
        PyObject *endpoint = worker && rules ? PyObject_GetAttr(worker, words[ENDPOINT]) : NULL;
        Row *row = &self->rows[self->count];
        *row = (Row){0};
        bool is_read = endpoint ? read_row(endpoints, endpoint, rules, row)
                                : worker && !rules && read_whole(worker, row);
        Py_XDECREF(endpoint);
        Py_XDECREF(worker);
        self->count++;
        if (!is_read) return false;
    }
    return true;
}

static bool read_rules(double now, PyObject *rates, SurveyRules *rules) {
    double each[5];
    if (!numbers_of(rates, each, 5)) return false;
    *rules = (SurveyRules){.now = now,
                           .rate = each[0],
                           .capacity_tokens = each[1],
                           .common_slowness = each[2],
                           .utilization_seconds = each[3],
                           .report_seconds = each[4]};
    return true;
}

/* LoadColumns(loads), or LoadColumns(load_class, endpoints, workers, now, rates) */
static PyObject *columns_new(PyTypeObject *type, PyObject *given, PyObject *Py_UNUSED(named)) {
    PyObject *load_class = NULL, *endpoints = NULL, *workers, *rates;
    double now;
    SurveyRules rules;
    bool has_loads = PyTuple_Size(given) == 1;
    bool is_given = has_loads
                        ? PyArg_ParseTuple(given, "O", &workers)
                        : PyArg_ParseTuple(given, "OO!OdO", &load_class, &PyDict_Type, &endpoints,
                                           &workers, &now, &rates) &&
                              read_rules(now, rates, &rules);
    CoreColumns *self = is_given ? (CoreColumns *)PyType_GenericAlloc(type, 0) : NULL;
    if (!self) return NULL;
    Py_XINCREF(load_class);
    self->load_class = load_class;
    if (read_rows(self, endpoints, workers, has_loads ? NULL : &rules)) return (PyObject *)self;
    Py_DECREF(self);
    return NULL;
}

/* load_of(load_class, endpoints, endpoint, now, rates) */
PyObject *module_load_of(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t were) {
    double now;
    SurveyRules rules;
    Row row;
    if (!are_given(given, were, "odooo") || !read_numbers(given + 3, &now, 1) ||
        !read_rules(now, given[4], &rules))
        return NULL;
    PyObject *load = read_row(given[1], given[2], &rules, &row) ? load_of_row(&row, given[0]) : NULL;
    Py_XDECREF(row.report);
    return load;
}

static Py_ssize_t columns_length(PyObject *self) { return ((CoreColumns *)self)->count; }

static PyObject *columns_item(PyObject *object, Py_ssize_t at) {
    const CoreColumns *self = (CoreColumns *)object;
    if (at < 0 || at >= self->count) {
        PyErr_SetString(PyExc_IndexError, "no such worker");
        return NULL;
    }
    return load_of_row(&self->rows[at], self->load_class);
}

/* affinity(count, cost): by the mean utilization and the shortest queue of the first workers. */
static PyObject *columns_affinity(CoreColumns *self, PyObject *const *given, Py_ssize_t were) {
    Py_ssize_t count;
    if (!are_given(given, were, "oo") || !read_size(given[0], &count)) return NULL;
    PyObject *cost = given[1];
    if (count < 0 || count > self->count) {
        PyErr_SetString(PyExc_ValueError, "not so many workers");
        return NULL;
    }
    double percent, busy_percent, rate;
    if (!get_number(cost, AFFINITY_PERCENT, &percent) ||
        !get_number(cost, BUSY_AFFINITY_PERCENT, &busy_percent) ||
        !get_number(cost, PREFILL_TOKENS_PER_SECOND, &rate))
        return NULL;
    double used = 0.0, least = Py_HUGE_VAL;
    for (Py_ssize_t n = 0; n < count; n++) {
        const WorkerLoad *load = &self->rows[n].load;
        double queued = load->backlog_tokens * load->slowness;
        used += load->utilization;
        if (queued < least) least = queued;
    }
    double waiting = count ? survey_waiting(used / (double)count, least / rate) : 0.0;
    return PyFloat_FromDouble((percent + busy_percent * waiting) / 100.0);
}

static PyObject *columns_requests(CoreColumns *self, PyObject *Py_UNUSED(none)) {
    PyObject *requests = PyList_New(self->count);
    for (Py_ssize_t n = 0; requests && n < self->count; n++) {
        const WorkerLoad *load = &self->rows[n].load;
        PyObject *each = PyFloat_FromDouble(load->in_flight + load->others);
        if (!each || PyList_SetItem(requests, n, each)) Py_CLEAR(requests);
    }
    return requests;
}

static PyObject *columns_slowness(CoreColumns *self, PyObject *Py_UNUSED(none)) {
    PyObject *slowness = PyList_New(self->count);
    for (Py_ssize_t n = 0; slowness && n < self->count; n++) {
        PyObject *each = PyFloat_FromDouble(self->rows[n].load.slowness);
        if (!each || PyList_SetItem(slowness, n, each)) Py_CLEAR(slowness);
    }
    return slowness;
}

/* Returns what a worker costs: with what it saves of the prompt, if it does; NULL after an error. */
static PyObject *cost_of(const Row *row, double cost, PyObject *worker, PyObject *saved,
                         double weight) {
    PyObject *name = PyObject_GetAttr(worker, words[NAME]);
    PyObject *less = name ? PyDict_GetItemWithError(saved, name) : NULL;
    Py_XDECREF(name);
    if (less) cost += weight * PyFloat_AsDouble(less) * row->load.slowness;
    return PyErr_Occurred() ? NULL : PyFloat_FromDouble(cost);
}

/* costs(workers, saved, uncached, affinity, running) */
static PyObject *columns_costs(CoreColumns *self, PyObject *const *given, Py_ssize_t were) {
    double each[3];
    if (!are_given(given, were, "odooo") || !read_numbers(given + 2, each, 3)) return NULL;
    PyObject *workers = given[0], *saved = given[1];
    double weighed = each[0], affinity = each[1], running = each[2];
    if (PySequence_Size(workers) != self->count) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "other workers");
        return NULL;
    }
    bool saves = PyDict_Size(saved) > 0;
    PyObject *costs = PyList_New(self->count);
    for (Py_ssize_t n = 0; costs && n < self->count; n++) {
        const Row *row = &self->rows[n];
        double whole = survey_cost(&row->load, affinity * weighed, running);
        PyObject *worker = saves ? PySequence_GetItem(workers, n) : NULL;
        PyObject *cost = worker   ? cost_of(row, whole, worker, saved, -affinity)
                         : !saves ? PyFloat_FromDouble(whole)
                                  : NULL;
        Py_XDECREF(worker);
        if (!cost || PyList_SetItem(costs, n, cost)) Py_CLEAR(costs);
    }
    return costs;
}

/* Returns how many live tokens added ones are expected to evict: an added token evicts one with the
 * square of the share that is occupied as the chance, and certainly once all of the cache is. */
static double evicted(double occupied, double added, double capacity) {
    double before = occupied / capacity, after = (occupied + added) / capacity;
    double below = before < 1.0 ? before * before * before / 3.0 : before - 2.0 / 3.0;
    double above = after < 1.0 ? after * after * after / 3.0 : after - 2.0 / 3.0;
    return capacity * (above - below);
}

/* Returns what a worker saves of a prompt; -1 after an error. */
static double saved_by(PyObject *workers, Py_ssize_t at, PyObject *saved) {
    PyObject *worker = PySequence_GetItem(workers, at);
    PyObject *name = worker ? PyObject_GetAttr(worker, words[NAME]) : NULL;
    PyObject *tokens = name ? PyDict_GetItemWithError(saved, name) : NULL;
    double found = tokens ? PyFloat_AsDouble(tokens) : 0.0;
    Py_XDECREF(name);
    Py_XDECREF(worker);
    return PyErr_Occurred() ? -1.0 : found;
}

/* Reads the number at a place of a list; returns false after an error. */
static bool read_item(PyObject *list, Py_ssize_t at, double *number) {
    PyObject *item = PyList_GetItem(list, at);
    *number = item ? PyFloat_AsDouble(item) : -1.0;
    return !PyErr_Occurred();
}

/* evicted(workers, saved, occupied, capacities, weighed, shared) */
PyObject *module_evicted(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t were) {
    double each[2];
    if (!are_given(given, were, "odlloo") || !read_numbers(given + 4, each, 2)) return NULL;
    PyObject *workers = given[0], *saved = given[1], *occupied = given[2], *capacities = given[3];
    double weighed = each[0], shared = each[1];
    Py_ssize_t count = PySequence_Size(workers);
    if (count < 0 || PyList_Size(occupied) != count || PyList_Size(capacities) != count) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "other workers");
        return NULL;
    }
    PyObject *costs = PyList_New(count);
    for (Py_ssize_t n = 0; costs && n < count; n++) {
        double live, capacity, held = saved_by(workers, n, saved), tokens = 0.0;
        bool is_read = held >= 0.0 && read_item(occupied, n, &live) &&
                       read_item(capacities, n, &capacity);
        if (is_read && capacity > 0.0) {
            held = held < weighed ? held : weighed;
            live += held > shared ? held - shared : 0.0;
            tokens = evicted(live, weighed - held, capacity);
        }
        PyObject *cost = is_read ? PyFloat_FromDouble(tokens) : NULL;
        if (!cost || PyList_SetItem(costs, n, cost)) Py_CLEAR(costs);
    }
    return costs;
}

static PyMethodDef columns_methods[] = {
    {"affinity", (PyCFunction)(void (*)(void))columns_affinity, METH_FASTCALL, NULL},
    {"costs", (PyCFunction)(void (*)(void))columns_costs, METH_FASTCALL, NULL},
    {"requests", (PyCFunction)columns_requests, METH_NOARGS, NULL},
    {"slowness", (PyCFunction)columns_slowness, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot columns_slots[] = {
    {Py_tp_doc, "The loads of compared workers; extproc/_core.pyi describes them."},
    {Py_tp_new, columns_new},
    {Py_tp_dealloc, columns_dealloc},
    {Py_tp_methods, columns_methods},
    {Py_sq_length, columns_length},
    {Py_sq_item, columns_item},
    {0, NULL},
};

PyType_Spec columns_spec = {"extproc._core.LoadColumns", sizeof(CoreColumns), 0,
                            Py_TPFLAGS_DEFAULT, columns_slots};

/* Returns a seed from random(), a number from 0 to below 1; false after an error. */
static bool draw_seed(PyObject *random, uint64_t *seed) {
    PyObject *value = PyObject_CallNoArgs(random);
    double number = value ? PyFloat_AsDouble(value) : -1.0;
    Py_XDECREF(value);
    *seed = number >= 0.0 && number < 1.0 ? (uint64_t)(number * 0x1p53) : 0;
    if (number >= 0.0 && number < 1.0) return true;
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "not from 0 to below 1");
    return false;
}

/* Returns the next number after a seed (SplitMix64: Steele, Lea and Flood, 2014). */
static uint64_t next_number(uint64_t *seed) {
    *seed += UINT64_C(0x9E3779B97F4A7C15);
    uint64_t number = *seed;
    number = (number ^ (number >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    number = (number ^ (number >> 27)) * UINT64_C(0x94D049BB133111EB);
    return number ^ (number >> 31);
}

static Py_ssize_t place_below(uint64_t number, Py_ssize_t count) {
    __extension__ typedef unsigned __int128 Wide;
    return (Py_ssize_t)((Wide)number * (Wide)count >> 64);
}

/* Puts as many different numbers below another one into a list; false after an error.
 *
 * is_drawn: a byte for each number, all 0. places: what the numbers stand for; NULL for themselves.
 */
static bool draw_places(PyObject *list, uint8_t *is_drawn, Py_ssize_t number, PyObject *places,
                        uint64_t seed) {
    Py_ssize_t count = PyList_Size(list);
    for (Py_ssize_t n = 0; n < count;) {
        Py_ssize_t at = place_below(next_number(&seed), number);
        if (is_drawn[at]) continue;
        is_drawn[at] = 1;
        PyObject *place = places ? PySequence_GetItem(places, at) : PyLong_FromSsize_t(at);
        if (!place || PyList_SetItem(list, n++, place)) return false;
    }
    return true;
}

/* Whether places are the numbers from 0, as a range; -1 after an error. */
static int are_numbers(PyObject *places, Py_ssize_t number) {
    if (Py_TYPE(places) != &PyRange_Type || !number) return 0;
    PyObject *first = PySequence_GetItem(places, 0), *last = PySequence_GetItem(places, number - 1);
    int is_so = first && last
                    ? !PyLong_AsSsize_t(first) && PyLong_AsSsize_t(last) == number - 1
                    : -1;
    Py_XDECREF(first);
    Py_XDECREF(last);
    return PyErr_Occurred() ? -1 : is_so;
}

/* drawn(places, count, random): as many of these places, in the order in which they were drawn. */
PyObject *module_drawn(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t were) {
    Py_ssize_t count;
    uint64_t seed;
    if (!are_given(given, were, "ooo") || !read_size(given[1], &count)) return NULL;
    PyObject *places = given[0], *random = given[2];
    Py_ssize_t number = PySequence_Size(places);
    if (number < 0) return NULL;
    if (count < 0 || count > number) {
        PyErr_SetString(PyExc_ValueError, "not so many places");
        return NULL;
    }
    int is_plain = are_numbers(places, number);
    if (is_plain < 0 || !draw_seed(random, &seed)) return NULL;
    uint8_t *is_drawn = PyMem_Calloc((size_t)number + 1, 1);
    if (!is_drawn) return PyErr_NoMemory();
    PyObject *drawn = PyList_New(count);
    if (drawn && !draw_places(drawn, is_drawn, number, is_plain ? NULL : places, seed))
        Py_CLEAR(drawn);
    PyMem_Free(is_drawn);
    return drawn;
}

/* --- the lowest ranks --- */

typedef struct {
    double rank;
    uint64_t chance;
    Py_ssize_t place;
} Ranked;

static bool is_lower(const Ranked *one, const Ranked *other) {
    return one->rank < other->rank || (one->rank == other->rank && one->chance < other->chance);
}

/* Copies the lowest rows, in their order, of equal ones the first; returns how many. */
static Py_ssize_t find_lowest(const Ranked *rows, Py_ssize_t number, Ranked *found,
                              Py_ssize_t most) {
    Py_ssize_t known = 0;
    for (Py_ssize_t n = 0; n < number; n++) {
        Py_ssize_t at = known;
        while (at && is_lower(&rows[n], &found[at - 1])) at--;
        if (at == most) continue;
        if (known < most) known++;
        for (Py_ssize_t to = known - 1; to > at; to--) found[to] = found[to - 1];
        found[at] = rows[n];
    }
    return known;
}

/* Reads ranks; false after an error. */
static bool read_ranks(PyObject *ranks, Ranked *rows, Py_ssize_t number) {
    for (Py_ssize_t n = 0; n < number; n++) {
        rows[n] = (Ranked){PyFloat_AsDouble(PyList_GetItem(ranks, n)), 0, n};
        if (rows[n].rank == -1.0 && PyErr_Occurred()) return false;
    }
    return true;
}

static PyObject *places_of(const Ranked *found, Py_ssize_t count) {
    PyObject *places = PyList_New(count);
    for (Py_ssize_t n = 0; places && n < count; n++) {
        PyObject *place = PyLong_FromSsize_t(found[n].place);
        if (!place || PyList_SetItem(places, n, place)) Py_CLEAR(places);
    }
    return places;
}

/* Returns the places of the lowest rows, at most `count`, with room for one more in `found`. */
static PyObject *lowest_of(Ranked *rows, Py_ssize_t number, Ranked *found, Py_ssize_t count,
                           PyObject *random) {
    /* one more than is wanted: whether the last one is among them may be a matter of chance */
    Py_ssize_t known = find_lowest(rows, number, found, count + 1);
    bool is_tie = false;
    for (Py_ssize_t n = 1; n < known; n++) is_tie = is_tie || found[n].rank == found[n - 1].rank;
    if (is_tie) {
        uint64_t seed;
        if (!draw_seed(random, &seed)) return NULL;
        for (Py_ssize_t n = 0; n < number; n++) rows[n].chance = next_number(&seed);
        known = find_lowest(rows, number, found, count + 1);
    }
    return places_of(found, known < count ? known : count);
}

/* lowest(ranks, count, random): the places of the lowest ranks, ties in random order. */
PyObject *module_lowest(PyObject *Py_UNUSED(module), PyObject *const *given, Py_ssize_t were) {
    Py_ssize_t count;
    if (!are_given(given, were, "loo") || !read_size(given[1], &count)) return NULL;
    PyObject *ranks = given[0], *random = given[2];
    Py_ssize_t number = PyList_Size(ranks);
    if (count > number) count = number;
    if (count < 0) count = 0;
    Ranked *rows = PyMem_Malloc(sizeof(Ranked) * (size_t)(number + count + 1));
    if (!rows) return PyErr_NoMemory();
    PyObject *made = read_ranks(ranks, rows, number)
                         ? lowest_of(rows, number, rows + number, count, random)
                         : NULL;
    PyMem_Free(rows);
    return made;
}

bool columns_prepare(void) {
    for (int word = 0; word < WORDS; word++) {
        words[word] = PyUnicode_InternFromString(SPELLED[word]);
        if (!words[word]) return false;
    }
    return true;
}
